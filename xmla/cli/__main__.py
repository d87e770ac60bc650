from xmla.cli import app

app()
