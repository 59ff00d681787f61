"""Words that common tokenizers write as one token each, with the space before them."""

FIRST = "We"
"""Every text begins with it: the first word has no space before it, and is a token of another kind."""

_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city name president
team minute idea body information back parent face level office door health person war history
party result change morning reason research girl moment air teacher force education
"""
WORDS = tuple(dict.fromkeys(_TEXT.split()))
