"""Trains the sample model further with transformers' Seq2SeqTrainer, whose options are those of this script.

accelerate launch examples/seq2seq_trainer.py --output_dir outputs/tuned --max_steps 20 --report_to none
"""

from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import vanilla_transformer  # noqa: F401  # makes the Auto classes know the model

(arguments,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained("outputs/sample")
model = AutoModelForSeq2SeqLM.from_pretrained("outputs/sample")
rows = load_dataset("sample_dataset", split="train[:256]")
rows = rows.map(lambda row: tokenizer(row["en"], text_target=row["de"]))
collator = DataCollatorForSeq2Seq(tokenizer, model=model)
trainer = Seq2SeqTrainer(model, arguments, collator, rows, processing_class=tokenizer)
trainer.train()
trainer.save_model()
