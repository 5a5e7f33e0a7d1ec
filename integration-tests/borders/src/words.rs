//! Words that a file must not contain, in whatever case.

/// A word to look for.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// Anywhere, inside other words, too.
    Part(&'static str),
    /// As a word of its own: no letter, digit or underscore on either side.
    Whole(&'static str),
}

impl Word {
    fn is_in(self, line: &str) -> bool {
        let is_of_a_word = |c: char| c.is_alphanumeric() || c == '_';
        match self {
            Self::Part(word) => line.contains(word),
            Self::Whole(word) => line.match_indices(word).any(|(at, _)| {
                let (before, after) = (&line[..at], &line[at + word.len()..]);
                !before.ends_with(is_of_a_word) && !after.starts_with(is_of_a_word)
            }),
        }
    }
}

/// Lines with one of the words, numbered from 1. Words are given in lower case.
pub fn lines_with<'a>(text: &'a str, words: &[Word]) -> Vec<(usize, &'a str)> {
    let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    let with_one = |(_, line): &(usize, &str)| {
        let line = line.to_lowercase();
        words.iter().any(|word| word.is_in(&line))
    };
    numbered.filter(with_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_told_from_parts_of_others() {
        let words = [Word::Part("qwen"), Word::Whole("expert")];
        let text = "expertise\nan Expert's\nexpert_ms\nMyQwenModel\n// expert";
        let found: Vec<_> = lines_with(text, &words).into_iter().map(|(line, _)| line).collect();
        assert_eq!(found, [2, 4, 5]);
    }
}
