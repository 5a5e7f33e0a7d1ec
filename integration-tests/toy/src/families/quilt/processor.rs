//! Prompts and chats to token ids.
//!
//! ```text
//! prompt   <begin> IMAGE .. text <end>                      an image is as many tokens as it has patches
//! chat     <begin> ROLE \n text or IMAGE .. <end> ..        what is learned: an answer and its end
//! ```

use std::{iter, path::Path, sync::Arc};

use coxswain_data::DataError;
use coxswain_models::{
    pretrained::{
        error::ModelError,
        pictures::{ImageShape, PatchShape},
        tokenizer_file,
        tokens::TokenIds,
    },
    vision_language::{ChatEncoder, EncodedChat, Message, Piece, PromptEncoder, PromptForm, Role},
};
use tokenizers::Tokenizer;

use super::{
    config::{Config, SpecialTokens},
    outline::patch_shape,
};

/// Stands for an image in rendered text.
const IMAGE: &str = "<|image_pad|>";

/// Keys of `config.json` and the tokens that they name.
pub const TOKEN_IDS: TokenIds<'_> =
    &[("image_token_id", IMAGE), ("begin_token_id", "<|im_start|>"), ("end_token_id", "<|im_end|>")];

/// A configuration that cannot be read, where text or images are.
pub fn unread(error: ModelError) -> DataError {
    match error {
        ModelError::Away(error) => error,
        ModelError::Config { path, field, problem } => {
            DataError::invalid(&path, field, problem, "use the checkpoint's own file")
        }
        error => {
            DataError::invalid(Path::new("config.json"), "(file)", error.to_string(), "repair or restore it")
        }
    }
}

/// The checkpoint's tokenizer, and what its ids mean to the model.
pub struct Text {
    tokenizer: Tokenizer,
    tokens: SpecialTokens,
    patches: PatchShape,
    vocab: usize,
}

impl Text {
    /// Reads `tokenizer.json` of the checkpoint at `model`.
    pub fn open(model: &Path) -> Result<Self, DataError> {
        let config = Config::read(model).map_err(unread)?;
        let tokenizer = tokenizer_file::read(&model.join("tokenizer.json"))?;
        let (tokens, patches) = (config.tokens, patch_shape(&config));
        Ok(Self { tokenizer, tokens, patches, vocab: config.vocab_size })
    }

    /// Ids of text that people wrote.
    fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        let (ids, SpecialTokens { image, begin, end }) = (encoding.get_ids(), self.tokens);
        if let Some(id) =
            ids.iter().find(|&&id| id as usize >= self.vocab || [image, begin, end].contains(&id))
        {
            return Err(format!("text {text:?} has token {id}, which no text may have; remove it"));
        }
        Ok(ids.to_vec())
    }

    fn image(&self, shape: ImageShape) -> impl Iterator<Item = u32> {
        iter::repeat_n(self.tokens.image, self.patches.tokens(shape))
    }
}

/// Renders and encodes prompts.
pub struct Prompts {
    text: Arc<Text>,
    template: String,
    images: usize,
    /// Tokens of the text that are kept.
    most: usize,
}

impl Prompts {
    /// Prompts of this form.
    pub fn new(text: Arc<Text>, form: &PromptForm<'_>) -> Self {
        let most = form.max_text_tokens.unwrap_or(usize::MAX);
        Self { text, template: form.template.to_owned(), images: form.images, most }
    }

    fn text_of(&self, task: &str) -> String {
        self.template.replace("{task}", task)
    }
}

impl PromptEncoder for Prompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self::new(Arc::clone(&self.text), form))
    }

    fn pad(&self) -> u32 {
        self.text.tokens.end
    }

    fn render(&self, task: &str) -> String {
        IMAGE.repeat(self.images) + &self.text_of(task)
    }

    fn cut(&self, task: &str) -> usize {
        self.text.ids(&self.text_of(task)).map_or(0, |ids| ids.len().saturating_sub(self.most))
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut ids = vec![self.text.tokens.begin];
        ids.extend(images.iter().flat_map(|shape| self.text.image(*shape)));
        ids.extend(self.text.ids(&self.text_of(task))?.into_iter().take(self.most));
        ids.push(self.text.tokens.end);
        Ok(ids)
    }
}

/// Renders and encodes chats.
pub struct Chats(pub Text);

impl ChatEncoder for Chats {
    fn pad(&self) -> u32 {
        self.0.tokens.end
    }

    fn image_token(&self) -> u32 {
        self.0.tokens.image
    }

    fn begin(&self) -> u32 {
        self.0.tokens.begin
    }

    fn ends(&self) -> Vec<u32> {
        vec![self.0.tokens.end]
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.0.tokenizer.decode(ids, true).map_err(|error| error.to_string())
    }

    fn encode(&self, chat: &[Message], images: &[ImageShape]) -> Result<EncodedChat, String> {
        let (mut ids, mut learned) = (Vec::new(), Vec::new());
        let mut images = images.iter();
        for message in chat {
            ids.extend(self.role(message.role)?);
            learned.resize(ids.len(), false);
            for piece in &message.pieces {
                match piece {
                    Piece::Text(text) => ids.extend(self.0.ids(text)?),
                    Piece::Image => {
                        let shape = images.next().ok_or("more images are named than there are")?;
                        ids.extend(self.0.image(*shape));
                    }
                }
            }
            ids.push(self.0.tokens.end);
            learned.resize(ids.len(), message.learned);
        }
        Ok(EncodedChat { ids, learned })
    }

    fn encode_question(&self, chat: &[Message], images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut ids = self.encode(chat, images)?.ids;
        ids.extend(self.role(Role::Assistant)?);
        Ok(ids)
    }
}

impl Chats {
    /// What the words of a role begin with.
    fn role(&self, role: Role) -> Result<Vec<u32>, String> {
        Ok([vec![self.0.tokens.begin], self.0.ids(&format!("{}\n", role.name()))?].concat())
    }
}
