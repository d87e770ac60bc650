"""Tables and pictures of the README and the documents, from the committed results."""
