"""The decision endpoint: `kvlane serve`, over HTTP with JSON.

The one part of the policy that knows sockets, files and clocks. `app` puts the parts together and `serve` runs them;
each of the other modules knows one thing.
"""
