"""Does the cost model order policies as the engine does?"""
