"""Chinese -> English: a handful of pairs, and a tokenizer that pads with its end-of-sentence token.

    纽约是一座城市  ->  New York is a city

python examples/chinese.py
accelerate launch train.py --config examples/chinese.yaml
echo 纽约是一座城市 | vanilla-transformer translate --model outputs/chinese --num_beams 4
"""

from common import Pair, make_parser, new_directory, write_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Written for this example. Validation and test recombine parts of the training sentences.
SENTENCES = {
    "train": """
        纽约是一座城市          New York is a city
        伦敦是一座城市          London is a city
        北京是一座城市          Beijing is a city
        北京是一座大城市        Beijing is a big city
        上海是一座大城市        Shanghai is a big city
        伦敦是一座大城市        London is a big city
        伦敦是一座古老的城市    London is an old city
        北京是一座古老的城市    Beijing is an old city
        巴黎是一座美丽的城市    Paris is a beautiful city
        上海是一座美丽的城市    Shanghai is a beautiful city
        纽约在美国              New York is in America
        伦敦在英国              London is in England
        北京在中国              Beijing is in China
        上海在中国              Shanghai is in China
        巴黎在法国              Paris is in France
        我住在北京              I live in Beijing
        我住在纽约              I live in New York
        他住在纽约              He lives in New York
        他住在上海              He lives in Shanghai
        她住在巴黎              She lives in Paris
        她住在伦敦              She lives in London
        我喜欢猫                I like cats
        我喜欢狗                I like dogs
        我不喜欢茶              I do not like tea
        我不喜欢狗              I do not like dogs
        他喜欢茶                He likes tea
        他喜欢猫                He likes cats
        他不喜欢狗              He does not like dogs
        她喜欢狗                She likes dogs
        她喜欢茶                She likes tea
        她不喜欢猫              She does not like cats
        我在喝茶                I am drinking tea
        我在喝水                I am drinking water
        我在看书                I am reading a book
        他在喝茶                He is drinking tea
        她在看书                She is reading a book
        她在喝水                She is drinking water
        你好                    Hello
        谢谢你的帮助            Thank you for your help
        今天天气很好            The weather is nice today
    """,
    "validation": """
        上海是一座城市          Shanghai is a city
        他住在北京              He lives in Beijing
        我喜欢茶                I like tea
        他在看书                He is reading a book
    """,
    "test": """
        巴黎是一座城市          Paris is a city
        纽约是一座大城市        New York is a big city
        她住在北京              She lives in Beijing
        我住在伦敦              I live in London
        她喜欢猫                She likes cats
        他在喝水                He is drinking water
    """,
}


def make_splits() -> dict[str, list[Pair]]:
    return {
        split: [tuple(line.split(maxsplit=1)) for line in text.strip().splitlines()]
        for split, text in SENTENCES.items()
    }


def make_tokenizer(texts: list[str], vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE like those of GPT-2 and Qwen: no bos, and one special token as both eos and padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, alphabet = "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__, "outputs/chinese_dataset", is_random=False)
    text = "a new directory for the tokenizer (default: %(default)s)"
    parser.add_argument("--tokenizer_dir", default="outputs/chinese_tokenizer", help=text)
    options = parser.parse_args(argv)
    splits = make_splits()
    tokenizer = make_tokenizer([text for pair in splits["train"] for text in pair])
    tokenizer.save_pretrained(new_directory(options.tokenizer_dir, "--tokenizer_dir"))
    write_dataset(options.output_dir, splits)
    print(f"{options.tokenizer_dir}: {len(tokenizer)} tokens; padding and end of sentence are {tokenizer.pad_token}")


if __name__ == "__main__":
    main()
