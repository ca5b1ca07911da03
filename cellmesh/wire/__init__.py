"""The protocol of controller and workers: messages, framing, payloads, transport, tickets."""
