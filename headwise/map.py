class AttentionMap:
    def __init__(self, problem, lse=None): pass
