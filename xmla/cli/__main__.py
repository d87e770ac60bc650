from xmla.cli import main

main()
