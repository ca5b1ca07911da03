// A backend as the tutorial on custom backends writes it, whose Work waits in C++: it holds no lock
// of Python, and neither a signal nor an exception ends it.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <chrono>
#include <thread>

namespace {

using Timeout = std::chrono::milliseconds;

std::string to_text(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

class SumWork : public c10d::Work {
 public:
  SumWork(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int number, at::Tensor tensor)
      : c10d::Work(rank, c10d::OpType::ALLREDUCE),
        store_(std::move(store)), rank_(rank), size_(size), number_(number), tensor_(tensor) {}

  bool wait(Timeout) override {
    store_->set(key(rank_), std::to_string(tensor_.item<double>()));
    double sum = 0;
    for (int rank = 0; rank < size_; ++rank) {
      while (!store_->check({key(rank)})) {
        std::this_thread::sleep_for(Timeout(5));
      }
      sum += std::stod(to_text(store_->get(key(rank))));
    }
    tensor_.fill_(sum);
    finish();
    return true;
  }

 private:
  std::string key(int rank) const {
    return std::to_string(number_) + "/" + std::to_string(rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_, number_;
  at::Tensor tensor_;
};

class WaitingBackend : public c10d::Backend {
 public:
  WaitingBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : c10d::Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "waiting"; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<SumWork>(store_, rank_, size_, ++number_, tensors.at(0));
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int number_ = 0;
};

}  // namespace

PYBIND11_MODULE(waiting_backend, module) {
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Timeout&)
          -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<WaitingBackend>(store, rank, size);
      },
      py::call_guard<py::gil_scoped_release>());
}
