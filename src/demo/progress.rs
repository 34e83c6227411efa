//! How far the run is: a bar on a terminal, else a line every 5 s.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const WIDTH: u64 = 30;
const LINE_EVERY: Duration = Duration::from_secs(5);

pub struct Progress {
    tasks: u64,
    look: Look,
}

enum Look {
    Bar,
    Lines { last: Instant },
}

impl Progress {
    pub fn new(tasks: u32) -> Self {
        let look = if std::io::stderr().is_terminal() { Look::Bar } else { Look::Lines { last: Instant::now() } };
        Self { tasks: tasks.into(), look }
    }

    pub fn show(&mut self, completed: u64, received: u64, kills: u32) {
        let text = format!(
            "{completed}/{} tasks completed, {received} deliveries at their consumers, relay killed {kills}x",
            self.tasks
        );
        // Nobody to read it is no reason to fail.
        match &mut self.look {
            Look::Bar => {
                let filled = (completed.min(self.tasks) + received.min(2 * self.tasks)) * WIDTH / (3 * self.tasks);
                let bar: String = (0..WIDTH).map(|n| if n < filled { '#' } else { ' ' }).collect();
                let _ = write!(std::io::stderr(), "\r[{bar}] {text}\x1b[K");
            }
            Look::Lines { last } if last.elapsed() >= LINE_EVERY => {
                *last = Instant::now();
                let _ = writeln!(std::io::stderr(), "{text}");
            }
            Look::Lines { .. } => {}
        }
    }

    pub fn done(&self) {
        if let Look::Bar = self.look {
            let _ = writeln!(std::io::stderr());
        }
    }
}
