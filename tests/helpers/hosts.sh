# Hosts of the shuffler, of the server and of the clients, at one switch; needs $HOSTS, a prefix of
# their names, and $PYTHON. Each is a network namespace.

set_up() {
    # The shuffler's clock is an hour fast.
    cc -shared -fPIC -o clock.so -x c - <<'C'
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
C
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=shuffler \
        -addext subjectAltName=IP:10.77.0.1 -keyout shuffler.key -out shuffler.crt
    ip netns add $HOSTS-switch
    ip -n $HOSTS-switch link add switch up type bridge
    for host in 1-shuffler 2-server 3-clients; do
        there=$HOSTS-${host#*-}
        ip netns add $there
        ip -n $there link add cable type veth peer name $host netns $HOSTS-switch
        ip -n $there address add 10.77.0.${host%-*}/24 dev cable
        ip -n $there link set cable up
        ip -n $HOSTS-switch link set $host master switch up
    done
}

start_shuffler() { # returns when it listens
    rm -f said
    LD_PRELOAD=./clock.so ip netns exec $HOSTS-shuffler "$PYTHON" \
        -m opacus_shuffle.federated.serve --settings settings.txt --secrets secrets.txt \
        --server-secret server.txt --certificate shuffler.crt --key shuffler.key \
        --host 10.77.0.1 >said 2>&1 &
    until grep -q "^shuffler at" said; do kill -0 $! && sleep 0.2; done
}

kill_shuffler() { ip netns pids $HOSTS-shuffler | xargs -r kill -9; }

cut_off() { ip -n $HOSTS-$1 link set cable down; }

plug_in() { for host in server clients; do ip -n $HOSTS-$host link set cable up; done; }

take_down() {
    kill_shuffler
    for host in switch shuffler server clients; do ip netns del $HOSTS-$host; done
}
