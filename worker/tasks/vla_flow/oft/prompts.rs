//! The prompt of a head that reads action tokens: that of any policy, its text followed by StarVLA's words
//! and tokens (`QwenOFT.py`), and nothing after the last of them.
//!
//! ```text
//! <|im_start|>user\n IMAGES TEXT Please predict the next 4 robot actions: <action>🔍🔍🔍🔍
//! ```
//!
//! StarVLA goes on with `<action>.`, the end of the turn and the beginning of the answer. No action token
//! attends to what follows it, so that its hidden state is the same without; and the tokens are the last of
//! each row, whatever they are in a family's vocabulary. Where a vocabulary has no token for the character,
//! the first of the tokens that it is made of stands for it, as in StarVLA.

use coxswain_models::{
    pretrained::pictures::ImageShape,
    vision_language::{PromptEncoder, PromptForm},
};

use crate::tokens::outline::estimated;

/// The character whose token stands for an action.
const ACTION: &str = "🔍";

/// The words before the action tokens.
fn words(horizon: usize) -> String {
    format!(" Please predict the next {horizon} robot actions: <action>")
}

/// Prompts of this text alone.
fn form(template: &str) -> PromptForm<'_> {
    PromptForm { template, images: 0, max_text_tokens: None }
}

/// Tokens that such a prompt has beyond its text's, by estimate.
pub fn estimated_tokens(horizon: usize) -> usize {
    estimated(words(horizon).len()) + horizon
}

/// Prompts that end with action tokens.
pub struct OftPrompts {
    inner: Box<dyn PromptEncoder>,
    horizon: usize,
    /// What stands behind the text in the model's own prompts, which is left out.
    tail: String,
    tail_tokens: usize,
    /// What stands there instead.
    ending: Vec<u32>,
}

impl OftPrompts {
    /// Prompts made of a family's own, for chunks of so many actions. Refuses a tokenizer that makes nothing
    /// of the character.
    pub fn new(inner: Box<dyn PromptEncoder>, horizon: usize) -> Result<Self, String> {
        let ids = |text: &str| inner.like(&form(text)).encode("", &[]);
        let (none, spoken, action) = (ids("")?, ids(&words(horizon))?, ids(ACTION)?);
        // Text stands where prompts without and with it begin to differ.
        let at = none.iter().zip(&action).take_while(|(without, with)| without == with).count();
        let tail_tokens = none.len() - at;
        if action.len() <= none.len() || spoken.len() <= none.len() {
            return Err(format!("has no token for {ACTION}, which stands for an action"));
        }
        let mut ending = spoken[at..spoken.len() - tail_tokens].to_vec();
        ending.resize(ending.len() + horizon, action[at]);
        let around = inner.like(&form(ACTION)).render("");
        let tail = around.rsplit_once(ACTION).map_or("", |(_, tail)| tail).to_owned();
        Ok(Self { inner, horizon, tail, tail_tokens, ending })
    }
}

impl PromptEncoder for OftPrompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        let Self { horizon, tail_tokens, .. } = *self;
        let (tail, ending) = (self.tail.clone(), self.ending.clone());
        Box::new(Self { inner: self.inner.like(form), horizon, tail, tail_tokens, ending })
    }

    fn pad(&self) -> u32 {
        self.inner.pad()
    }

    fn render(&self, task: &str) -> String {
        let mut text = self.inner.render(task);
        text.truncate(text.len() - self.tail.len());
        text + &words(self.horizon) + &ACTION.repeat(self.horizon)
    }

    fn cut(&self, task: &str) -> usize {
        self.inner.cut(task)
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut ids = self.inner.encode(task, images)?;
        ids.truncate(ids.len() - self.tail_tokens);
        ids.extend(&self.ending);
        Ok(ids)
    }
}
