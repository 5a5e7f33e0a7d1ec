//! Held-out chats for people: what they ask first, and what they and the model answer.

use coxswain_data::pictures;
use coxswain_models::vision_language::{Piece, Role};
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_task::{Example, ExamplePicture, Sampling, TaskError, TextPair};

use super::{
    data::{Chat, ChatImage, Chats},
    generation::Writer,
    model::ChatModel,
};

/// Longest answer that people are shown.
const SHOWN_TOKENS: usize = 64;

/// Examples of those of these chats that ask something.
pub(super) fn examples<B: Tape<Base = B>>(
    model: &ChatModel<B>,
    trainables: &Trainables<B>,
    chats: &Chats,
    indices: &[u64],
) -> Result<Vec<Example>, TaskError> {
    let sampling = Sampling { max_new_tokens: SHOWN_TOKENS, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 };
    let writer = Writer { model, trainables, reader: chats.reader(), sampling };
    let mut examples = Vec::new();
    for &sample in indices {
        let chat = chats.chat(sample).map_err(TaskError::bad_input)?;
        let Some((question, answer)) = first_exchange(&chat) else { continue };
        let asked = chats.question(sample, &question).map_err(TaskError::bad_input)?;
        let written = writer.answer(sample as usize, &[asked])?;
        let pictures = question.images.iter().filter_map(|ChatImage { path, .. }| {
            let image = pictures::decode(&chats.image(sample, path).ok()?).ok()?;
            ExamplePicture::of_rgb(path.clone(), [image.height, image.width], &image.rgb)
        });
        let pictures = pictures.collect();
        let texts = written.into_iter().map(|written| TextPair {
            name: text(&question, Role::User),
            reference: answer.clone(),
            predicted: written.text,
        });
        examples.push(Example { sample, pictures, texts: texts.collect(), ..Example::default() });
    }
    Ok(examples)
}

/// A chat up to its first answer, and that answer; none if nobody asks.
fn first_exchange(chat: &Chat) -> Option<(Chat, String)> {
    let answered = chat.messages.iter().position(|message| message.role == Role::Assistant)?;
    let (before, rest) = chat.messages.split_at(answered);
    before.iter().find(|message| message.role == Role::User)?;
    let places = before.iter().flat_map(|message| &message.pieces);
    let images = places.filter(|piece| **piece == Piece::Image).count();
    let question = Chat { messages: before.to_vec(), images: chat.images.get(..images)?.to_vec() };
    let answer = Chat { messages: rest[..1].to_vec(), images: Vec::new() };
    Some((question, text(&answer, Role::Assistant)))
}

/// What somebody says in a chat.
fn text(chat: &Chat, role: Role) -> String {
    let spoken = chat.messages.iter().filter(|message| message.role == role);
    let pieces = spoken.flat_map(|message| &message.pieces).filter_map(|piece| match piece {
        Piece::Text(text) => Some(text.as_str()),
        Piece::Image => None,
    });
    pieces.collect::<Vec<_>>().join(" ")
}
