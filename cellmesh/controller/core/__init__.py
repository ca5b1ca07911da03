"""State machines of the controller, as pure code: without sockets, threads or clocks."""
