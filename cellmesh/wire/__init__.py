"""The protocol that controller and workers share: messages, framing, payloads, transport,
tickets.
"""
