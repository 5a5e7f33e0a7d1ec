//! The token embedding in full. In the model that ships it is the LM head as well, so that both of its
//! gradients meet in one table.

use coxswain_models::families::shelf;
use coxswain_models::pretrained::checkpoint::Checkpoint;
use coxswain_nn::kernels::sizes::Sizes;

use super::*;

const TABLE: &str = "model.language_model.embed_tokens.weight";

fn with_embedding(changes: &[(&str, Value)]) -> Fixture {
    let train = [("model.train", json!(["embed_tokens"]))];
    Fixture::new(&[&train[..], changes].concat())
}

#[test]
fn its_gradient_is_a_derivative_and_both_of_its_uses_are_in_it() {
    let fixture = with_embedding(&[]);
    are_derivatives(&fixture);
    // `lm_head` is another name for the table here, and `language_model` means it among others.
    let named = Fixture::new(&[("model.train", json!(["lm_head"]))]);
    assert!(named.run(&[0, 3]) == fixture.run(&[0, 3]));
    let beside = ("lora.targets", json!(r".*visual.*qkv"));
    are_derivatives(&Fixture::new(&[("model.train", json!(["language_model"])), beside]));
    let layout = fixture.trainables.layout();
    let table = layout.get(layout.find(TABLE).expect("it trains"));
    assert_eq!((table.group, table.decay), (Group::BASE, false));
    let (_, gradients) = fixture.run(&[0, 3]);
    let width = table.shape[1];
    // The head reaches every row, the lookup those of tokens in the batch.
    let rows: Vec<_> = gradients[table.range()].chunks(width).collect();
    assert!(rows.iter().all(|row| row.iter().any(|gradient| *gradient != 0.0)));
    assert!(fixture.objective.modules(layout).iter().any(|row| row.module == "language.base"));
}

#[test]
fn recompute_streamed_blocks_and_a_second_run_change_no_bit() {
    let of = |changes: &[(&str, Value)]| with_embedding(changes).run(&[0, 1, 2, 3]);
    let once = of(&[]);
    assert!(of(&[]) == once);
    for mode in ["selective", "full"] {
        assert!(of(&[("train.recompute", json!(mode))]) == once, "{mode}");
    }
    assert!(of(&[("train.recompute", json!("full")), ("memory.offload", json!("layers"))]) == once);
}

#[test]
fn a_batch_in_parts_has_the_same_gradients_up_to_rounding() {
    let fixture = with_embedding(&[]);
    let (_, gradients) = fixture.run(&[0, 1, 2, 3]);
    let mut added = vec![0.0; gradients.len()];
    for part in [&[0, 1][..], &[2], &[3]] {
        added.iter_mut().zip(fixture.run(part).1).for_each(|(sum, value)| *sum += value);
    }
    assert!(relative_error(&added, &gradients) < 1e-5);
}

#[test]
fn an_adapter_on_a_head_that_is_the_table_is_refused() {
    let changes = [("model.train", json!(["embed_tokens"])), ("lora.targets", json!(["q_proj", "lm_head"]))];
    let spec = spec(&assets().join("shapes/chats.jsonl"), &changes);
    let samples = Chats::from_spec(&spec, shelf()).expect("they ship");
    let built = TaskOn::<Flex>::build(&Sft::<Flex>::default(), &spec, &samples, &Default::default());
    let message = built.err().expect("refused").to_string();
    assert!(message.contains("embed_tokens") && message.contains("has a LoRA adapter"), "{message}");
}

#[test]
fn in_host_memory_it_cannot_be_the_heads_weight_as_well() {
    let spec = spec(&assets().join("shapes/chats.jsonl"), &[("memory.offload", json!("embedding"))]);
    let samples = Chats::from_spec(&spec, shelf()).expect("they ship");
    let built = TaskOn::<Flex>::build(&Sft::<Flex>::default(), &spec, &samples, &Default::default());
    let message = built.err().expect("refused").to_string();
    assert!(message.contains("memory.offload") && message.contains("the head's weight"), "{message}");
}

#[test]
fn it_goes_out_merged_and_as_peft_has_it_and_another_run_starts_from_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (donor, merged) = (with_embedding(&[]), dir.path().join("merged"));
    let layout = donor.trainables.layout();
    donor.objective.export(dir.path(), layout, &donor.values).expect("it has space");
    let adapter = dir.path().join("adapter");
    let config = fs::read_to_string(adapter.join("adapter_config.json")).expect("written");
    let config: Value = serde_json::from_str(&config).expect("valid");
    assert_eq!(config["modules_to_save"], json!(["model.language_model.embed_tokens"]));
    assert_eq!(config["ensure_weight_tying"], json!(true));

    let table = layout.get(layout.find(TABLE).expect("it trains"));
    let here = spec(&assets().join("shapes/chats.jsonl"), &[("model.train", json!(["embed_tokens"]))]);
    for place in [dir.path(), &adapter] {
        let read = Sft::<Flex>::default().read_weights(&here, place).expect("the same run");
        let again: Vec<_> = read.iter().filter(|tensor| tensor.name == TABLE).collect();
        assert!(!again.is_empty(), "{}", place.display());
        assert!(again.iter().all(|tensor| tensor.values == donor.values[table.range()]));
        assert!(read.iter().all(|tensor| layout.find(&tensor.name).is_some()), "no copy of the head");
    }
    let without = spec(&assets().join("shapes/chats.jsonl"), &[]);
    let message =
        Sft::<Flex>::default().read_weights(&without, &adapter).expect_err("it would be lost").to_string();
    assert!(message.contains("embed_tokens") && message.contains("add it to model.train"), "{message}");

    let written = donor.objective.export_merged(&merged, layout, &donor.values);
    written.expect("something trained").expect("it has space");
    let family = shelf::<Sizes>().vision_language.of(&assets().join("tiny-vla")).expect("it is read");
    let outline = family.outline(&assets().join("tiny-vla")).expect("it ships");
    let read = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir, outline.rules).expect("a checkpoint");
        let stored = checkpoint.matrix(TABLE, &table.shape, &[table.len()], Default::default());
        stored.expect("it has the table").as_slice::<f32>().expect("float32").to_vec()
    };
    assert!(family.outline(&merged).expect("copied").tied_to_head().is_some());
    // The file's own type is bfloat16.
    assert!(relative_error(&read(&merged), &donor.values[table.range()]) < 4e-3);
    assert!(relative_error(&read(&assets().join("tiny-vla")), &donor.values[table.range()]) > 1e-2);
}
