//! The model against Transformers and PEFT, on the CPU, with weights in both types.

use coxswain_integration_tests::golden::{Computer, IN_BFLOAT16, Tolerance, hold};
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_worker::device::{Device, NoAccelerator};

const FLOAT32: Tolerance = Tolerance { values: 1e-4, gradients: 1e-3 };
fn cpu(dtype: FrozenDtype) -> Computer {
    Computer { device: Device::Cpu, accelerator: &NoAccelerator { driver: || false }, dtype }
}

macro_rules! golden_cases {
    ($($test:ident: $case:literal;)*) => {$(
        #[test]
        fn $test() {
            hold($case, cpu(FrozenDtype::Float32), FLOAT32);
        }
    )*};
}

golden_cases! {
    published_layout_with_grouped_queries_odd_images_and_left_padding: "flat-gqa-left";
    nested_layout_with_tied_head_and_right_padding: "nested-tied-right";
    one_key_head_and_sharded_bfloat16_weights: "mqa-sharded-bf16";
    rank_stabilised_adapter_with_patterns_in_the_older_spelling: "rslora-patterns";
    text_alone_from_float16_with_an_adapter_on_the_head: "text-only-f16";
    low_rank_dropout_with_the_masks_that_peft_was_given: "dropout";
    modules_of_every_kind_trained_in_full_beside_adapters: "full";
    the_token_embedding_and_the_head_trained_in_full: "embeddings";
    one_table_that_is_both_trained_in_full: "embeddings-tied";
    biases_of_adapted_modules_trained_beside_them: "bias-lora-only";
    all_biases_trained_beside_adapters: "bias-all";
    magnitudes_and_directions_trained_apart: "dora";
    the_same_under_dropout: "dora-dropout";
    a_frozen_model_with_an_image_in_every_row: "frozen";
    the_first_t5_with_a_tied_head_and_padding: "t5-first";
    a_gated_t5_of_unequal_depths_with_an_odd_number_of_heads: "t5-gated-uneven";
    mt5_with_adapters_in_a_few_layers: "mt5";
    magnitudes_in_cross_attention_above_a_frozen_encoder: "t5-cross-dora";
    dropout_of_sources_and_targets_with_the_masks_that_peft_was_given: "t5-dropout";
    a_t5_that_trains_in_full_with_its_tied_table_and_position_biases: "t5-full-tied";
    mt5_whose_tables_and_head_alone_train: "mt5-tables";
    qwen3_as_published_with_two_streams_a_tied_head_and_left_padding: "qwen3-tied-left";
    qwen3_as_transformers_writes_it_with_three_streams_and_a_head_of_its_own: "qwen3-untied-right";
    qwen3_with_one_key_head_and_sharded_bfloat16_weights: "qwen3-mqa-sharded-bf16";
    qwen3_frozen_with_a_stream_for_every_layer: "qwen3-frozen";
    qwen3_with_modules_of_every_kind_trained_in_full: "qwen3-full";
    qwen3_with_all_biases_trained_beside_adapters: "qwen3-bias";
}

#[test]
fn weights_in_4_bits_and_in_8_are_those_of_bitsandbytes_under_peft() {
    hold("nf4", cpu(FrozenDtype::Nf4), FLOAT32);
    hold("int8", cpu(FrozenDtype::Int8), FLOAT32);
}

#[test]
fn weights_that_are_bfloat16_in_the_file_may_stay_so_in_memory() {
    for case in IN_BFLOAT16 {
        hold(case, cpu(FrozenDtype::Bfloat16), FLOAT32);
        // Where the processor multiplies them as they are, inputs are rounded, as in PyTorch under autocast.
        hold(case, cpu(FrozenDtype::Bfloat16), Tolerance { values: 2e-2, ..Tolerance::of_autocast(case) });
    }
}
