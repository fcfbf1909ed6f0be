#!/usr/bin/env bash
# Repeats docs/results.md at full length: models by the published recipe, students of three of them, the control, and
# their scores.
# bash recipes/multi30k_tiny.sh multi30k_tok outputs/multi30k_tiny          # after a stop, the same command resumes
# SEEDS="1 2 3 4 5" bash recipes/multi30k_tiny.sh multi30k_tok outputs/multi30k_tiny    # at least 1, 2 and 3, the teachers
# Further options go to train.py: bash recipes/multi30k_tiny.sh sample_dataset outputs/trial --max_steps 100
set -euo pipefail
data=${1:?give the directory of the dataset} output=${2:?give a directory for the models}
options=(--resume_from_checkpoint "${@:3}")
seeds=${SEEDS:-1 2 3}

train() {  # train NAME OPTION...: resumes an unfinished run, skips a finished one; it never sees the test split
    [ -e "$output/$1/all_results.json" ] || accelerate launch --mixed_precision bf16 train.py \
        --train_file "$data/train.jsonl" --validation_file "$data/validation.jsonl" --num_beams 1 \
        --output_dir "$output/$1" "${@:2}" "${options[@]}"
}

for seed in $seeds; do
    train "published-$seed" --config recipes/multi30k_wu2021.yaml --seed "$seed"
done

# Each student begins as a published model, and learns what the first three predict together, for the pairs and for
# their translations.
teachers=("$output"/published-{1,2,3}) translations="$output/translations.txt"
if [ ! -e "$translations" ]; then
    sources="$output/sources.txt"
    python -c 'import json, sys; [print(json.loads(line)["en"]) for line in sys.stdin]' < "$data/train.jsonl" > "$sources"
    vanilla-transformer translate --model "${teachers[@]}" --num_beams 5 < "$sources" > "$translations.part"
    paste "$sources" "$translations.part" > "$translations.new"
    mv "$translations.new" "$translations"
fi
for seed in $seeds; do
    train "student-$seed" --config recipes/multi30k_tiny.yaml --train_file "$data/train.jsonl" "$translations" \
        --model_name_or_path "$output/published-$seed" --teacher "${teachers[@]}" --seed "$seed"
done

# The control goes on for as many steps as a student, on the true pairs alone, with the dropout that it began with: with
# that of a student, it gets worse (docs/LOG.md).
sed '/^teacher:/,/^distillation_weight:/d; s/^dropout: .*/dropout: 0.3/' recipes/multi30k_tiny.yaml > "$output/control.yaml"
for seed in $seeds; do
    train "control-$seed" --config "$output/control.yaml" --train_file "$data/train.jsonl" \
        --model_name_or_path "$output/published-$seed" --seed "$seed"
done

# All choices were made on the validation split; only finished models translate the test split.
score() {  # score NAME MODEL...: p is against the first model
    [ -e "$output/$1/results.json" ] || vanilla-transformer evaluate --model "${@:2}" --output "$output/$1" \
        --dataset_name "$data" --split test --source_lang en --target_lang de --num_beams 5 \
        --bleu_tokenize none --lowercase
}
systems=()
for system in published student control; do
    for seed in $seeds; do systems+=("$output/$system-$seed"); done
done
evaluation="evaluation-of-${seeds// /-}"
score "$evaluation" "${systems[@]}" "$output/student-1+$output/student-2+$output/student-3"
for seed in $seeds; do
    score "evaluation-$seed" "$output"/{published,control,student}-"$seed"
done
python benchmarks/quality.py "$output/$evaluation"
