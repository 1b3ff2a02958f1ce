"""The built-in words."""

import random
from collections.abc import Iterable


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
    able amber ancient ample bald bitter blank bold brave brief bright brisk broad bronze calm
    careful cheap civil clean clear clever cold common cool copper curious curved damp dark
    dear deep dense dim dry dusty eager early easy empty equal exact fair faint famous fancy
    fast fierce fine firm flat foggy fond frank fresh frozen gentle giant glad golden grand
    grateful grave gray great green happy hard harsh hasty heavy hidden high hollow honest
    humble icy idle jolly keen kind large late lazy lean light little lively local lonely long
    loose loud lucky mellow merry mild misty modest narrow neat new noble noisy odd old open
    orange pale patient plain pleasant polite poor proud pure purple quick quiet rapid rare
    ready rich ripe rough round royal rusty sad safe salty sandy secret sharp shiny short shy
    silent silver simple sleepy slim slow small smooth soft solid sour steady steep sticky
    stiff stormy strange strong sturdy sunny sweet swift tall tame tender thick thin tidy tiny
    tired tough true vast velvet violet warm weak wealthy wet white wide wild windy wise wooden
    young
""")
NOUNS = _words("""
    acorn actor airport anchor ankle answer apple apron arch arrow artist attic aunt autumn
    baker balcony banner barn barrel basin basket beach beam bear bench bicycle bird blanket
    boat bottle boulder bowl branch bread brick bridge broom brother bucket builder bush butter
    button cabin cabinet camel camera candle canvas captain carpet carrot castle cat cellar
    chain chair chalk cherry chest chimney circle city clay cliff clock cloud coach coast coat
    coin comb compass cottage cotton cousin cow cradle crane creek cricket crown cup curtain
    dancer daughter desert desk diamond doctor dog door dragon drawer driver drum duck eagle
    elbow engine evening fabric falcon farm farmer feather fence ferry field finger fireplace
    fisher flag flame flower flute forest fork fortress fountain fox friend frog fruit garden
    garlic gate giraffe glass glove goat grain grape grass guitar hammer harbor harvest hat
    hawk hedge helmet hill honey horn horse hotel house island ivory jacket jar jewel judge
    jungle kettle key kitchen kite knee knight ladder lake lamp lantern laundry lawyer leaf
    leather lemon letter library lion lizard lock magnet map marble market mason meadow melon
    mill miner mirror monkey moon morning mother mountain mouse museum needle neighbor nest net
    notebook nurse oak oasis ocean olive onion orchard otter owl paddle painter palace paper
    parrot path peach pearl pebble pencil pepper piano picture pigeon pillow pilot pine pipe
    pirate planet plate plow pocket pond porch potato prince puddle pumpkin puppet quarry queen
    quilt rabbit raft rail rain rainbow ribbon ring river road robin rocket roof root rope rose
    ruler saddle sailor salmon school scissors sculptor seed shadow sheep shelf shell shepherd
    ship shirt shoe shore shovel singer sister sky sled smoke snail snow soap soldier sparrow
    spider spoon spring squirrel stable star station statue stone stove stream street student
    summer sunset swan table tailor teacher temple tent theater thread thunder ticket tiger
    toast tower trail train treasure tree trumpet tulip tunnel turtle umbrella uncle valley
    vase village violin wagon waiter wall wallet walnut water wave well whale wheat wheel
    whistle willow window wing winter wolf wool writer yard zebra
""")
VERBS = _words("""
    add admire allow answer arrive bake believe borrow bounce breathe bring build buy call
    carry catch choose climb collect cook count cross dance decide deliver describe dig draw
    dream drink drive enjoy enter explain explore fetch find finish fold follow forget gather
    give guess help hide hold hurry imagine invite join jump keep knock laugh learn leave lift
    listen look make measure mend move notice obey offer paint pay plant play polish pour pull
    push reach read remember repair rest return ride run search sell send share shout sing sit
    speak stand stay study swim teach tell thank think throw touch travel try visit wait walk
    wander wash wear whisper
""")
PAST = _words("""
    admired avoided borrowed carried cleaned copied covered crossed described drew examined
    followed found forgot guarded hid ignored kept left lifted measured mended missed moved
    noticed opened painted passed pulled pushed reached remembered repaired searched sold
    studied touched visited washed watched
""")
TIMES = _words("""
    afternoon autumn evening month morning night season spring summer week winter year
""")
ONSETS = _words("b br c ch d dr f fl g gr h j k l m n p pl r s sh st t tr v w z")
VOWELS = _words("a e i o u ai ea oo")
CODAS = ("", "", "", "l", "n", "r", "s", "t", "m", "nd")


def made_up(count: int, taken: Iterable[str]) -> list[str]:
    """The first `count` of an endless list of distinct words that can be pronounced."""
    dice, found, seen = random.Random(0), [], set(taken)
    while len(found) < count:
        syllables = dice.choice((2, 2, 3))
        parts = (dice.choice(ONSETS) + dice.choice(VOWELS) for _ in range(syllables))
        word = "".join(parts) + dice.choice(CODAS)
        if word not in seen:
            seen.add(word)
            found.append(word)
    return found
