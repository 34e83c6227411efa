//! Who cleans up after us when we cannot: a small shell process that holds the other end of a pipe. The pipe closes
//! when this process ends, however it ends; then the guardian ends what we started and removes our folders.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Orders on stdin: `watch PID SIGNAL`, `forget PID`. Arguments: folders to remove at the end.
const GUARDIAN: &str = r#"
trap '' HUP INT TERM
alive() {
    kill -s 0 -- "-$1" || return 1
    # One that only waits to be reaped has ended.
    read -r state <"/proc/$1/stat" || return 0
    case ${state##*) } in Z*) return 1 ;; esac
}
watched=
while read -r order pid signal; do
    case $order in
    watch) watched="$watched $pid:$signal" ;;
    forget)
        kept=
        for w in $watched; do [ "${w%:*}" = "$pid" ] || kept="$kept $w"; done
        watched=$kept ;;
    esac
done
for w in $watched; do kill -s "${w#*:}" -- "-${w%:*}"; done
tries=0
for w in $watched; do
    while [ $tries -lt 100 ] && alive "${w%:*}"; do
        sleep 0.1
        tries=$((tries + 1))
    done
    kill -s KILL -- "-${w%:*}"
done
rm -rf -- "$@"
"#;

/// A child waits for its "go", so that there is no moment at which it runs and is not watched.
const GATE: &str = r#"read -r go || exit 1; exec "$@" </dev/null"#;

/// How a child is asked to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    Interrupt,
    Term,
    Quit,
    Kill,
    Stop,
    Continue,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "INT",
            Self::Term => "TERM",
            Self::Quit => "QUIT",
            Self::Kill => "KILL",
            Self::Stop => "STOP",
            Self::Continue => "CONT",
        }
    }
}

/// Watches over the children it spawned. Dropped, it removes its folders; the children are ended first.
#[derive(Debug)]
pub struct Guardian {
    shell: Child,
    orders: Option<ChildStdin>,
}

impl Guardian {
    /// `folders` are removed when everything has ended.
    pub fn new(folders: &[&Path]) -> io::Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", GUARDIAN, "guardian"])
            .args(folders)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0)
            .spawn()?;
        let orders = shell.stdin.take();
        Ok(Self { shell, orders })
    }

    /// A command for [`Guardian::spawn`]; add arguments, environment, output and user as usual.
    pub fn command(program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", GATE, "gate"]).arg(program.as_ref());
        command
    }

    /// Starts `command` in a process group of its own. If we die, its group gets `last`, and SIGKILL 10 s later.
    pub fn spawn(&mut self, mut command: Command, last: Signal) -> io::Result<Guarded> {
        let mut child = command.stdin(Stdio::piped()).process_group(0).spawn()?;
        self.order(&format!("watch {} {}\n", child.id(), last.name()))?;
        if let Some(mut gate) = child.stdin.take() {
            gate.write_all(b"go\n")?;
        }
        Ok(Guarded { child, last })
    }

    /// Stops watching a child that has ended, since its number may soon be somebody else's.
    pub fn forget(&mut self, ended: &Guarded) -> io::Result<()> {
        self.order(&format!("forget {}\n", ended.pid()))
    }

    fn order(&mut self, line: &str) -> io::Result<()> {
        match &mut self.orders {
            Some(orders) => orders.write_all(line.as_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.shell.wait();
    }
}

/// A child that does not outlive us. Dropped, it is ended and waited for.
#[derive(Debug)]
pub struct Guarded {
    child: Child,
    last: Signal,
}

impl Guarded {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the child's whole process group.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        // The shell's own `kill`: safe code, and there is no /bin/kill on a bare Debian.
        let line = format!("kill -s {} -- -{}", signal.name(), self.pid());
        let status = Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).stderr(Stdio::null()).status()?;
        if status.success() { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// The exit status, if it has ended.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for the end; an error where it has not come within `limit`.
    pub async fn wait(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        let waited = tokio::time::timeout(limit, async {
            loop {
                match self.child.try_wait()? {
                    Some(status) => return Ok(status),
                    None => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        });
        waited.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.signal(Signal::Continue).and_then(|()| self.signal(self.last));
            for _ in 0..500 {
                match self.child.try_wait() {
                    Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                    _ => return,
                }
            }
            let _ = self.signal(Signal::Kill);
            let _ = self.child.wait();
        }
    }
}
