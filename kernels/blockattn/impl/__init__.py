"""Implementations of the one operation; :mod:`blockattn.impl.registry` chooses among them."""
