#!/usr/bin/env bash
# Repeats docs/results.md at full length: teachers, students of three of them, the control, and their scores.
# bash recipes/multi30k_tiny.sh multi30k_tok outputs/multi30k_tiny          # after a stop, the same command resumes
# SEEDS="1 2 3 4 5" bash recipes/multi30k_tiny.sh multi30k_tok outputs/multi30k_tiny    # at least 1, 2 and 3, the teachers
# TEACHER=recipes/multi30k_muon.yaml bash recipes/multi30k_tiny.sh ...    # teachers by this recipe, not by the published one
# Further options go to train.py: bash recipes/multi30k_tiny.sh sample_dataset outputs/trial --max_steps 100
set -euo pipefail
data=${1:?give the directory of the dataset} output=${2:?give a directory for the models}
options=(--resume_from_checkpoint "${@:3}")
seeds=${SEEDS:-1 2 3} teacher=${TEACHER:-recipes/multi30k_wu2021.yaml}

train() {  # train NAME OPTION...: resumes an unfinished run, skips a finished one; it never sees the test split
    [ -e "$output/$1/all_results.json" ] || accelerate launch --mixed_precision bf16 train.py \
        --train_file "$data/train.jsonl" --validation_file "$data/validation.jsonl" --num_beams 1 \
        --output_dir "$output/$1" "${@:2}" "${options[@]}"
}

for seed in $seeds; do
    train "teacher-$seed" --config "$teacher" --seed "$seed"
done

# Each student begins as a teacher, and learns what the first three predict together, for the pairs and for their
# translations.
teachers=("$output"/teacher-{1,2,3}) translations="$output/translations.txt"
if [ ! -e "$translations" ]; then
    sources="$output/sources.txt"
    python -c 'import json, sys; [print(json.loads(line)["en"]) for line in sys.stdin]' < "$data/train.jsonl" > "$sources"
    vanilla-transformer translate --model "${teachers[@]}" --num_beams 5 < "$sources" > "$translations.part"
    paste "$sources" "$translations.part" > "$translations.new"
    mv "$translations.new" "$translations"
fi
for seed in $seeds; do
    train "student-$seed" --config recipes/multi30k_tiny.yaml --train_file "$data/train.jsonl" "$translations" \
        --model_name_or_path "$output/teacher-$seed" --teacher "${teachers[@]}" --seed "$seed"
done

# The control goes on for as many steps as a student, on the true pairs alone, with the dropout that it began with: with
# that of a student, it gets worse (docs/LOG.md).
sed '/^teacher:/,/^distillation_weight:/d; s/^dropout: .*/dropout: 0.3/' recipes/multi30k_tiny.yaml > "$output/control.yaml"
for seed in $seeds; do
    train "control-$seed" --config "$output/control.yaml" --train_file "$data/train.jsonl" \
        --model_name_or_path "$output/teacher-$seed" --seed "$seed"
done

# All choices were made on the validation split; only finished models translate the test split.
systems=()
for system in teacher student control; do
    for seed in $seeds; do systems+=("$output/$system-$seed"); done
done
for system in teacher student; do systems+=("$output/$system-1+$output/$system-2+$output/$system-3"); done
evaluation="$output/evaluation-of-${seeds// /-}"
[ -e "$evaluation/results.json" ] || vanilla-transformer evaluate --model "${systems[@]}" --output "$evaluation" \
    --dataset_name "$data" --split test --source_lang en --target_lang de --num_beams 5 --bleu_tokenize none --lowercase
python benchmarks/quality.py "$evaluation" --references "$evaluation/references.txt"
