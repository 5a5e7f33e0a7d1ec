//! Text to token ids: prompts of robots' tasks, and chats. Errors say what is wrong with the text.

use crate::pretrained::pictures::ImageShape;

/// How prompts are made of a task's text.
#[derive(Clone, Copy, Debug)]
pub struct PromptForm<'f> {
    /// `data.prompt`.
    pub template: &'f str,
    /// Images, which come first.
    pub images: usize,
    /// Tokens of the text that are kept, as LeRobot's `tokenizer_max_length` and openpi's `max_token_len`
    /// keep them: the first ones. All if none.
    pub max_text_tokens: Option<usize>,
}

/// Renders and encodes prompts.
pub trait PromptEncoder: Send + Sync {
    /// Prompts of another form by the same tokenizer, which is not loaded again.
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder>;

    /// The id that fills up shorter rows of a batch.
    fn pad(&self) -> u32;

    /// The prompt for `task` as text, with one placeholder for each image.
    fn render(&self, task: &str) -> String;

    /// What stands around the task in every prompt: the prompt for `{task}`.
    fn template(&self) -> String {
        self.render("{task}")
    }

    /// How many tokens of the text are left out of the prompt for `task`.
    fn cut(&self, task: &str) -> usize;

    /// Token ids of the prompt for `task` with images of these shapes.
    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String>;

    /// Token ids of the prompt where the robot's normalised state is this, which some prompts tell.
    fn encode_observed(&self, task: &str, _state: &[f32], images: &[ImageShape]) -> Result<Vec<u32>, String> {
        self.encode(task, images)
    }
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sets the scene.
    System,
    /// Asks.
    User,
    /// Answers: what is learned.
    Assistant,
    /// What a tool that the assistant has called says.
    Tool,
}

impl Role {
    /// As chat templates have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text.
    Text(String),
    /// The chat's next image.
    Image,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said, in order.
    pub pieces: Vec<Piece>,
    /// Whether it is learned.
    pub learned: bool,
}

impl Message {
    /// A turn that is learned if it is the assistant's.
    pub fn new(role: Role, pieces: Vec<Piece>) -> Self {
        Self { role, pieces, learned: role == Role::Assistant }
    }
}

/// A chat as the model reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedChat {
    /// One id per token, image placeholders expanded.
    pub ids: Vec<u32>,
    /// Whether predicting it is learned, for each token.
    pub learned: Vec<bool>,
}

/// Renders and encodes chats.
pub trait ChatEncoder: Send + Sync {
    /// The id that fills up shorter rows of a batch.
    fn pad(&self) -> u32;

    /// The id that stands for a token of an image.
    fn image_token(&self) -> u32;

    /// The id that begins a turn.
    fn begin(&self) -> u32;

    /// What an answer may end with.
    fn ends(&self) -> Vec<u32>;

    /// Text of an answer's ids, without special tokens.
    fn decode(&self, ids: &[u32]) -> Result<String, String>;

    /// Ids of a chat with images of these shapes, in order of their pieces.
    fn encode(&self, chat: &[Message], images: &[ImageShape]) -> Result<EncodedChat, String>;

    /// Ids of a chat and of the beginning of the assistant's next turn, which is to be written.
    fn encode_question(&self, chat: &[Message], images: &[ImageShape]) -> Result<Vec<u32>, String>;
}
