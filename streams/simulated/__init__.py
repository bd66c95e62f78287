"""A device on a virtual clock that checks the order of everything done with it: `backend.SimulatedBackend`."""
