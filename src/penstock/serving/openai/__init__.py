"""OpenAI's routes: bodies in, responses and events out.  It knows no sockets."""
