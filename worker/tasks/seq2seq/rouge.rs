//! ROUGE (Lin 2004): how much of a reference an answer has, counted in words.
//!
//! ```text
//! ROUGE-N    words in a row that both have, as often as both have them
//! ROUGE-L    the longest words that both have in the same order
//! F          2 p r / (p + r), with p the share of the answer's and r that of the reference's
//! ```
//!
//! A word is a run of letters, marks and digits of any script, in lower case: Hangul counts as Latin does,
//! where the usual implementation deletes all but `a-z0-9`. A script that sets no spaces (Chinese, Japanese)
//! would make one word of a clause, so each of its characters is a word.

use std::collections::HashMap;

/// Names of what [`of`] tells, in its order.
pub const NAMES: [&str; 3] = ["rouge1", "rouge2", "rougeL"];

/// ROUGE-1, ROUGE-2 and ROUGE-L of an answer, each as F from 0 to 1. Two texts without words are alike.
pub fn of(answer: &str, reference: &str) -> [f64; 3] {
    let [answer, reference] = [answer, reference].map(|text| text.to_lowercase());
    let (answer, reference) = (words(&answer), words(&reference));
    if answer.is_empty() && reference.is_empty() {
        return [1.0; 3];
    }
    let rows = |n: usize| {
        let shared = shared(&answer, &reference, n);
        let of = |words: &[&str]| (words.len() + 1).saturating_sub(n);
        f(shared, of(&answer), of(&reference))
    };
    [rows(1), rows(2), f(longest_common(&answer, &reference), answer.len(), reference.len())]
}

fn f(shared: usize, answer: usize, reference: usize) -> f64 {
    if shared == 0 { 0.0 } else { 2.0 * shared as f64 / (answer + reference) as f64 }
}

/// Rows of `n` words that both have, each as often as the one that has it less often.
fn shared<'t>(answer: &[&'t str], reference: &[&'t str], n: usize) -> usize {
    let mut left: HashMap<&[&'t str], usize> = HashMap::new();
    reference.windows(n).for_each(|row| *left.entry(row).or_default() += 1);
    let mut shared = 0;
    for row in answer.windows(n) {
        if let Some(count) = left.get_mut(row).filter(|count| **count > 0) {
            *count -= 1;
            shared += 1;
        }
    }
    shared
}

fn longest_common(answer: &[&str], reference: &[&str]) -> usize {
    // Of the row above: the longest of the answer so far with each beginning of the reference.
    let mut lengths = vec![0; reference.len() + 1];
    for word in answer {
        let mut above_left = 0;
        for (at, other) in reference.iter().enumerate() {
            let above = lengths[at + 1];
            lengths[at + 1] = if word == other { above_left + 1 } else { above.max(lengths[at]) };
            above_left = above;
        }
    }
    lengths[reference.len()]
}

/// The words of a text in lower case.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = None;
    for (at, letter) in text.char_indices() {
        let alone = without_spaces(letter);
        if !alone && (letter.is_alphanumeric() || is_mark(letter)) {
            start.get_or_insert(at);
            continue;
        }
        words.extend(start.take().map(|start| &text[start..at]));
        if alone {
            words.push(&text[at..at + letter.len_utf8()]);
        }
    }
    words.extend(start.map(|start| &text[start..]));
    words
}

/// Kana, and the ideographs of the common blocks.
fn without_spaces(letter: char) -> bool {
    matches!(letter, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}')
}

/// Combining marks of the general block, and those of Indic scripts that Rust does not count as letters.
fn is_mark(letter: char) -> bool {
    matches!(
        letter,
        '\u{300}'
            ..='\u{36f}'
                | '\u{93c}'
                | '\u{94d}'
                | '\u{9bc}'
                | '\u{9cd}'
                | '\u{bcd}'
                | '\u{c4d}'
                | '\u{ccd}'
                | '\u{d4d}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: [f64; 3], wanted: [f64; 3]) {
        assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} is not {wanted:?}");
    }

    #[test]
    fn english_is_counted_as_by_the_usual_implementation() {
        // Lin 2004, 3: police killed the gunman.
        near(of("police kill the gunman", "police killed the gunman"), [0.75, 1.0 / 3.0, 0.75]);
        near(of("the gunman kill police", "police killed the gunman"), [0.75, 1.0 / 3.0, 0.5]);
        near(of("The cat, the CAT!", "the cat"), [2.0 * 2.0 / 6.0, 2.0 / 4.0, 2.0 * 2.0 / 6.0]);
        near(of("a b", "a"), [2.0 / 3.0, 0.0, 2.0 / 3.0]);
    }

    #[test]
    fn korean_counts_by_words_and_chinese_by_characters() {
        near(of("오늘 서울은 맑다", "오늘 서울은 흐리다."), [2.0 / 3.0, 0.5, 2.0 / 3.0]);
        near(of("부산은 맑다", "오늘 서울은 흐리다."), [0.0; 3]);
        near(of("今天很好", "今天不好"), [0.75, 1.0 / 3.0, 0.75]);
        assert_eq!(words("café 3월 नमस्ते 東京、ok"), ["café", "3월", "नमस्ते", "東", "京", "ok"]);
    }

    #[test]
    fn nothing_is_like_nothing_and_unlike_anything_else() {
        near(of("", "…"), [1.0; 3]);
        near(of("", "a"), [0.0; 3]);
        near(of("a", ""), [0.0; 3]);
    }
}
