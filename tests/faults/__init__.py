"""What a mesh survives: faults crossed with what the ranks were doing, and a soak of random ones.

``python -m tests.faults --full`` runs the whole table, ``python -m tests.faults.soak --seed 1
--minutes 30`` the soak; the tests run a part of both.
"""
