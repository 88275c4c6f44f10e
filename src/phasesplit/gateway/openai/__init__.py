"""The wire: what OpenAI clients send and get, and what each of a request's two machines is sent."""
