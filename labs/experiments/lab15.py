PREDICT = ("?", "", len)


def add_options(p):
    pass
