//! The action expert and the sensor encoder against PyTorch, on the CPU.

use burn_flex::Flex;
use coxswain_integration_tests::expert::hold;
use coxswain_proto::run_spec::Recompute;

const TOLERANCE: f64 = 1e-4;

#[test]
fn the_expert_computes_what_pytorch_computes() {
    hold::<Flex>("plain", Recompute::None, &Default::default(), TOLERANCE);
}

#[test]
fn adapters_in_an_expert_get_the_gradients_that_peft_gives_them() {
    for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
        hold::<Flex>("adapted", mode, &Default::default(), TOLERANCE);
    }
}

#[test]
fn time_in_actions_mlps_at_the_ends_future_tokens_and_normed_features_are_pytorchs() {
    for mode in [Recompute::None, Recompute::Full] {
        hold::<Flex>("of-the-field", mode, &Default::default(), TOLERANCE);
    }
}

#[test]
fn an_expert_with_a_block_for_each_layer_is_starvlas() {
    for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
        hold::<Flex>("layerwise", mode, &Default::default(), TOLERANCE);
    }
}

#[test]
fn repeated_draws_sensor_tokens_and_padding_agree_with_repeating_everything() {
    for mode in [Recompute::None, Recompute::Full] {
        hold::<Flex>("repeated-sensor-padded", mode, &Default::default(), TOLERANCE);
    }
}
