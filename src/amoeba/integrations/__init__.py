"""Where aMoEba meets other libraries. Each module here imports the library it is named after."""
