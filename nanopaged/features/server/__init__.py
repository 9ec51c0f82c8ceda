"""OpenAI's API over HTTP (app.py). What is imported from here imports torch, in programs of its own (uvicorn, Ray)."""
from nanopaged.options import default_feature

if threads := default_feature("threads", "a CPU's threads, which wait for each other on a busy machine,"):
    threads.start()
