"""What the controller decides: pure, without sockets, threads or clocks."""
