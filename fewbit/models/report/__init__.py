"""What a run did, as people read it: a page, a model card, and the facts behind both."""
