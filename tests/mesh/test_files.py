"""Values that ranks read from files themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

import cellmesh as cm
from cellmesh.errors import MeshUsageError

WEIGHT = torch.arange(1024 * 1031, dtype=torch.float32).reshape(1024, 1031)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tensors = {"w": WEIGHT, "a.b": torch.arange(7).bfloat16(), "empty": torch.empty(0, 3)}
    save_file(tensors, folder / "w.safetensors", metadata={"format": "pt"})
    np.save(folder / "w.npy", WEIGHT.numpy())
    np.save(folder / "f.npy", np.asfortranarray(WEIGHT.numpy()))
    torch.save({"model": {"w": WEIGHT}, "step": 3}, folder / "w.pt")
    return folder


def cut(folder: Path, name: str, num_bytes: int) -> Path:
    path = folder / f"cut-{num_bytes}-{name}"
    path.write_bytes((folder / name).read_bytes()[:num_bytes])
    return path


SOURCES = [("w.safetensors", "w"), ("w.npy", None), ("f.npy", None), ("w.pt", "model.w")]


@pytest.mark.parametrize(("file", "key"), SOURCES, ids=[file for file, _ in SOURCES])
def test_ranks_map_files(mesh: cm.Mesh, folder: Path, file: str, key: str | None) -> None:
    before = (folder / file).read_bytes()
    value = cm.from_file(folder / file, key=key)
    mesh.push(x=value, nest={"deep": [cm.from_file(folder / file, key=key)]})
    mesh.cell("x[0, 0] = rank + 5")  # its own copy of the page
    assert mesh.pull("float(x[0, 0]), float(x[-1, -1]), float(nest['deep'][0][0, 0])").list == [
        (rank + 5.0, float(WEIGHT[-1, -1]), 0.0) for rank in range(4)
    ]
    mesh.push(x=value, shard=0)
    assert mesh.pull("tuple(x.shape)").list == [(256, 1031)] * 4
    assert torch.equal(torch.as_tensor(mesh.pull("x", gather=True)), WEIGHT)
    mesh.push(x=value, placements=[Replicate(), Shard(1)])
    assert torch.equal(mesh.pull("x", gather=True), WEIGHT)
    assert mesh[0].run(lambda w: float(w[1, 0]), value) == 1031.0
    assert (folder / file).read_bytes() == before


@pytest.mark.parametrize(
    ("file", "key"), [*SOURCES[:2], SOURCES[3]], ids=["safetensors", "npy", "pt"]
)
def test_a_rank_reads_its_part_of_a_file_only(
    mesh: cm.Mesh, folder: Path, file: str, key: str | None
) -> None:
    path = cut(folder, file, (folder / file).stat().st_size)
    mesh.push(x=cm.from_file(path, key=key), shard=0)
    os.truncate(
        path, path.stat().st_size // 2 + (64 << 10)
    )  # what ranks 2 and 3 would read has gone
    for part, own in zip(mesh[:2].pull("x").list, WEIGHT.chunk(4), strict=False):
        assert torch.equal(torch.as_tensor(part), own)


def test_a_whole_file(mesh: cm.Mesh, folder: Path) -> None:
    mesh.push(x=cm.from_file(folder / "w.safetensors"), y=cm.from_file(folder / "w.pt"))
    parts = "sorted(x), x['a.b'].tolist(), x['empty'].shape[1], y['step'], y['model']['w'].shape[0]"
    assert mesh[0].pull(parts) == (
        ["a.b", "empty", "w"], [*range(7)], 3, 3, 1024,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["w.safetensors", "w.npy", "w.pt"])
@pytest.mark.parametrize("num_bytes", [0, 4, 100, 4096])
def test_a_file_shorter_than_its_header_says_is_refused(
    folder: Path, name: str, num_bytes: int
) -> None:
    path = cut(folder, name, num_bytes)
    with pytest.raises(
        MeshUsageError, match=rf"{path.name} (\({num_bytes} bytes\)|is {num_bytes} bytes long)"
    ):
        cm.from_file(path)


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("none.npy", None, "none.npy cannot be read: No such file"),
        ("w.safetensors", "v", "has no key 'v'; it has w, a.b, empty|it has"),
        ("w.npy", "v", "holds one array, and no key 'v'"),
        ("", None, "is no .safetensors, .npy, .pt or .pth file"),
    ],
)
def test_file_without_a_value_is_refused(
    folder: Path, name: str, key: str | None, text: str
) -> None:
    with pytest.raises(MeshUsageError, match=text):
        cm.from_file(folder / name, key=key)


def test_errors_found_by_ranks_are_reported(quick: cm.Mesh, folder: Path) -> None:
    path = cut(folder, "w.npy", (folder / "w.npy").stat().st_size)
    value: Any = cm.from_file(path)
    with pytest.raises(MeshUsageError, match=r"w.npy.* no dim 2|x has 2 dims"):
        quick.push(x=value, shard=2)
    with pytest.raises(cm.RankFailure, match=r"has no key 'v'; it has w"):
        quick.push(x=cm.from_file(folder / "w.pt", "model.v"))
    path.write_bytes(b"")
    with pytest.raises(cm.RankFailure, match="is 0 bytes long here, and was"):
        quick.push(x=value)
