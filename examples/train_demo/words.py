"""Word lists the training conversations are made of."""

NAMES = (
    "Ada Alan Chris Anna Tom Maria Peter Lucy David Emma Sam Nina Paul Laura Max Julia Ben Sofia "
    "Mark Clara Alex Eva John Mary James Alice Robert Helen Frank Rosa Oscar Iris Victor Nora "
    "Hugo Ella Leo Mia Felix Zoe Adam Ruth Simon Grace Daniel Olga Martin Kate Bob Carol Eric "
    "Dana Henry Jane Ivan Lena Karl Tina Omar Leila Wei Yuki"
).split()

CITIES = (
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Athens Dublin Prague Warsaw Cairo "
    "Delhi Lima Boston Chicago Denver Seattle Sydney Toronto Moscow Seoul Beijing Geneva Zurich "
    "Munich Hamburg Milan Nice Lyon Porto Bern Quito Havana Dakar Tunis Miami Dallas"
).split()

CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Poland": "Warsaw",
}

CODE_WORDS = (
    "BANANA TIGER APPLE OCEAN ROBOT PIANO LEMON CASTLE WINTER ROCKET GARDEN SILVER DRAGON COFFEE "
    "MANGO BRIDGE PLANET CANDLE FOREST PEPPER VIOLIN ZEBRA COOKIE DIAMOND FALCON TURTLE MUFFIN "
    "HARBOR COMET WALNUT"
).split()

ANIMALS = "dog cat bird horse fish rabbit bear fox owl frog".split()

SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ki ko la le li lo ma me mi mo na ne no pa pi ra re ri ro sa "
    "si so ta te to va vi vo za zo"
).split()
