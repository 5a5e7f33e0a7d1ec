//! Qwen2.5-VL as tasks find it.

use coxswain_nn::kernels::Tape;

use super::{config::QwenConfig, vision::WindowTower};
use crate::{
    chatml::{ChatMlForm, ToolTurns},
    pretrained::family::ModelTypes,
    two_towers::family::{TowersFamily, TowersFamilyOn},
};

/// The family `qwen2_5_vl`.
#[derive(Clone, Copy, Debug)]
pub struct Qwen2_5Vl;

impl ModelTypes for Qwen2_5Vl {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen2_5_vl"]
    }
}

impl TowersFamily for Qwen2_5Vl {
    type Config = QwenConfig;

    const FORM: ChatMlForm = ChatMlForm {
        family: "Qwen2.5-VL",
        patch: 14,
        own_system_turn: true,
        tool_turns: ToolTurns::AsTheyAre,
    };
}

impl<B: Tape<Base = B>> TowersFamilyOn<B> for Qwen2_5Vl {
    type Tower = WindowTower<B>;
}
