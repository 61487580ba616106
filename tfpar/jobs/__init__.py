"""Ranks as jobs: started, examined, installed for, measured."""
