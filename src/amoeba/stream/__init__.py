"""Experts beyond memory: kept in a store on disk, brought to where they are computed when they are needed."""
