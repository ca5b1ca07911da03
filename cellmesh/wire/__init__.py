"""What both sides speak: messages, framing, payloads, transport, tickets."""
