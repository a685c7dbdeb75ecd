"""Numpy references of every kernel: plain loops, float64 where it matters, no numba.

They define what is right. Installed as ``numba_ddtree.refs``, so that ``backend="numpy"`` can run
them and ``python -m numba_ddtree.run check`` can compare the kernels with them. A reference takes
plain numpy arrays of valid shape and dtype; checking arguments is the business of the public
functions in ``numba_ddtree``.
"""
