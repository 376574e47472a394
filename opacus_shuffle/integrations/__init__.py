"""Private training in other libraries, one module for each library.

``docs/how_to/`` has an example of each: ``lightning.rst``, ``hugging_face_trainer.rst``,
``accelerate.rst`` and ``log_epsilon.rst``. Importing this package imports none of the libraries.
"""
