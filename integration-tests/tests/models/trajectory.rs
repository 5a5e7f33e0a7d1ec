//! Streaming training on trajectories against PyTorch, Transformers and PEFT, on the CPU.

use burn_flex::Flex;
use coxswain_integration_tests::trajectory::{CASES, hold, hold_trajectories};

#[test]
fn trajectories_are_those_of_transformers_vision_tower() {
    hold_trajectories::<Flex>(&Default::default());
}

#[test]
fn losses_and_gradients_of_every_network_are_those_of_pytorch_and_peft() {
    for case in CASES {
        for recompute in ["none", "selective", "full"] {
            hold::<Flex>(case, recompute, &Default::default());
        }
    }
}
