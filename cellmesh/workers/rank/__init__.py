"""A rank: the process that runs user code on its main thread, with a control thread that answers
the controller at the same time.
"""
