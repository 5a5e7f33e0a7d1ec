//! Qwen3-VL as tasks find it.

use coxswain_nn::kernels::Tape;

use super::{config::Qwen3VlConfig, vision::DeepStackTower};
use crate::{
    chatml::{ChatMlForm, ToolTurns},
    pretrained::family::ModelTypes,
    two_towers::family::{TowersFamily, TowersFamilyOn},
};

/// The family `qwen3_vl`.
#[derive(Clone, Copy, Debug)]
pub struct Qwen3Vl;

impl ModelTypes for Qwen3Vl {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_vl"]
    }
}

impl TowersFamily for Qwen3Vl {
    type Config = Qwen3VlConfig;

    const FORM: ChatMlForm = ChatMlForm {
        family: "Qwen3-VL",
        patch: 16,
        own_system_turn: false,
        tool_turns: ToolTurns::AsTheUsers,
    };
}

impl<B: Tape<Base = B>> TowersFamilyOn<B> for Qwen3Vl {
    type Tower = DeepStackTower<B>;
}
