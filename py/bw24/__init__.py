"""bw24: exact, fast LLM inference. The command line is `bw24` (= `python -m bw24`); the library's entry is `bw24.engine.Engine`."""

__version__ = "0.1.0"
