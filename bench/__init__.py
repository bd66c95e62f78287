"""kvlane.bench"""
