//! Prompts that tell the robot's state behind the task, as starVLA's QwenPI_v3 has them:
//!
//! ```text
//! <|im_start|>user\n IMAGES put the cup away [STATE] 127 3 255 [ACTION]<|im_end|>\n ..
//! ```
//!
//! A value is the bin of pi0.5 that it lies in ([`coxswain_policies::pi::bins`]). Without a state, or where
//! none is given, the prompt is the model's own.

use coxswain_models::{
    pretrained::pictures::ImageShape,
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_policies::pi::bins;

/// A family's own prompts, with states.
pub(super) struct StatePrompts(pub Box<dyn PromptEncoder>);

impl PromptEncoder for StatePrompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self(self.0.like(form)))
    }

    fn pad(&self) -> u32 {
        self.0.pad()
    }

    fn render(&self, task: &str) -> String {
        self.0.render(task)
    }

    fn cut(&self, task: &str) -> usize {
        self.0.cut(task)
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        self.0.encode(task, images)
    }

    fn encode_observed(&self, task: &str, state: &[f32], images: &[ImageShape]) -> Result<Vec<u32>, String> {
        if state.is_empty() {
            return self.0.encode(task, images);
        }
        self.0.encode(&format!("{task} [STATE] {} [ACTION]", bins(state)), images)
    }
}

#[cfg(test)]
mod tests {
    use coxswain_models::families::shelf;
    use coxswain_nn::kernels::sizes::Sizes;

    use super::*;
    use crate::vla_flow::testing::small::MODEL;

    #[test]
    fn a_state_is_told_behind_the_task_and_a_prompt_without_one_is_the_models_own() {
        let family = shelf::<Sizes>().vision_language.of(MODEL.as_ref()).expect("its own is read");
        let form = PromptForm { template: "Now {task}.", images: 1, max_text_tokens: None };
        let own = family.prompts(MODEL.as_ref(), &form).expect("its tokenizer");
        let grids = [[1, 4, 6]];
        let prompts = StatePrompts(own.like(&form));
        let told = prompts.encode_observed("open the drawer", &[0.0, -2.0, 0.996], &grids).expect("a prompt");
        let words = "open the drawer [STATE] 128 -1 255 [ACTION]";
        assert_eq!(told, own.encode(words, &grids).expect("a prompt"));
        let plain = own.encode("open the drawer", &grids);
        assert_eq!(prompts.encode_observed("open the drawer", &[], &grids), plain);
        assert_eq!(prompts.like(&form).encode("open the drawer", &grids), plain);
    }
}
