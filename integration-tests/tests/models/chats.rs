//! Supervised fine-tuning against Transformers and PEFT, on the CPU.

use burn_flex::Flex;
use coxswain_integration_tests::{
    generation,
    sft::{CASES, hold},
};

#[test]
fn loss_and_gradients_of_chats_are_those_of_transformers_and_peft() {
    for case in CASES {
        for recompute in ["none", "selective", "full"] {
            hold::<Flex>(case, recompute, &Default::default());
        }
    }
}

#[test]
fn what_is_written_is_what_transformers_writes() {
    generation::hold::<Flex>(&Default::default());
}
