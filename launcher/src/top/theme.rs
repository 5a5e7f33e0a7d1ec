//! How things look, with colours and without.

use ratatui_core::style::{Color, Modifier, Style};

/// What of the terminal is used.
#[derive(Clone, Copy, Debug)]
pub struct Theme {
    colours: bool,
}

impl Theme {
    /// With colours, or with bold, dim and reversed letters alone.
    pub fn new(colours: bool) -> Self {
        Self { colours }
    }

    fn coloured(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// The run's name, a chart's title.
    pub fn title(self) -> Style {
        // On a faint border, too.
        Style::new().add_modifier(Modifier::BOLD).remove_modifier(Modifier::DIM)
    }

    /// What is there for orientation.
    pub fn faint(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// Something is wrong.
    pub fn warning(self) -> Style {
        self.coloured(Color::Yellow).add_modifier(Modifier::BOLD)
    }

    /// The bar and the first chart.
    pub fn loss(self) -> Style {
        self.coloured(Color::Cyan)
    }

    /// The second chart.
    pub fn speed(self) -> Style {
        self.coloured(Color::Green)
    }

    /// What is marked or asked.
    pub fn marked(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}
