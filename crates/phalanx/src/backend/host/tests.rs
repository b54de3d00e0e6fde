//! What happens at an instant that no trial of whole ranks can choose.

use super::*;
use crate::os::{Process, SharedFile};
use crate::sync::Ordering;

/// Two ranks that take each other for processes.
fn pair() -> [HostComm; 2] {
    let processes = (0..2).map(|_| Process::current().unwrap()).collect();
    of_world(World::processes("job", SharedFile::create().unwrap(), processes, 2).unwrap())
}

fn pair_of_threads() -> [HostComm; 2] {
    of_world(World::threads().unwrap())
}

fn of_world(world: World) -> [HostComm; 2] {
    let world = Arc::new(world);
    let made = NewChannel::create(&world, 2).unwrap();
    [0, 1].map(|rank| {
        let channel = NewChannel::open(&world, made.id()).unwrap();
        HostComm::attach(world.clone(), channel, rank, vec![0, 1], Duration::from_secs(60))
    })
}

#[test]
fn what_was_read_while_a_peer_gave_up_does_not_count() {
    let [reader, owner] = pair();
    assert!(reader.endpoint.inside(0, || ()).is_ok());
    assert!(reader.endpoint.inside(0, || owner.abort()).is_err());
}

#[test]
fn nothing_is_sent_behind_a_message_that_was_given_up() {
    let [sender, _receiver] = pair();
    // More than the ring holds.
    let message = vec![1u8; 4 << 20];
    let transfer = Transfer::host(Direction::Send(message.as_ptr()), 1, 0, DType::U8, message.len());
    // SAFETY: the message outlives the communicator.
    let [first, _second] = [0, 1].map(|_| unsafe { sender.post(transfer) }.unwrap());
    assert!(sender.progress().unwrap());
    sender.set_timeout(Duration::from_millis(1));
    assert!(sender.wait(first, &|| ()).unwrap_err().is_fatal());

    let mailbox = sender.endpoint.channel.mailbox(0, 1);
    let written = mailbox.sent_chunks.get();
    assert!(written > 0);
    mailbox.taken_chunks.set(written);
    sender.progress().unwrap();
    assert_eq!(mailbox.sent_chunks.get(), written);
}

#[test]
fn threads_of_a_rank_that_fail_at_once_have_one_verdict() {
    for _ in 0..3000 {
        let [rank, peer] = pair_of_threads();
        let context = verdict::Context::of_last(rank.endpoint.own(), 0);
        let verdicts =
            [verdict::Verdict::Aborted { rank: 0 }, verdict::Verdict::Timeout { missing: vec![1], context }];
        let come = std::sync::atomic::AtomicUsize::new(0);
        let fail = |verdict: &verdict::Verdict| {
            come.fetch_add(1, Ordering::Relaxed);
            while come.load(Ordering::Relaxed) < 2 {
                std::hint::spin_loop();
            }
            rank.endpoint.fail(verdict).to_string()
        };
        let told: Vec<String> = std::thread::scope(|scope| {
            let threads = verdicts.each_ref().map(|verdict| scope.spawn(|| fail(verdict)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let later = peer.endpoint.check().unwrap_err().to_string();
        assert!(told.iter().all(|told| *told == later), "{told:?}, later {later}");
    }
}
