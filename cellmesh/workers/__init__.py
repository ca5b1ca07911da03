"""The host's side: agent, zygote, ranks. Never imports the controller's side."""
